"""stallscope: where a CUDA job loses time, seen from below Python."""

__version__ = "0.1.0"
__all__ = ["__version__"]
