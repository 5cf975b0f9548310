"""The native drain; everything else stands in pyproject.toml, which has no word for cffi modules."""

from setuptools import setup

setup(cffi_modules=["native/drain/build_drain.py:ffibuilder"])
