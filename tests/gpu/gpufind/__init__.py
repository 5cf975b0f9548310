"""Whether the real CUDA stack hits the symbols that stallscope hooks: counted, step by step, without BPF."""
