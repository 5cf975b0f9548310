"""Readers of bytes that a traced program controls: ELF files and copies of its memory.

All of it runs in a process of its own that holds no privileges (see `__main__`). The readers are written on
`struct` and `os.pread`: pyelftools would add 4 MB and 42 ms to each parser process, raises whatever its parser
meets, and can't bound its work on a hostile file. The tests use it as the reference the results are compared with.
"""
