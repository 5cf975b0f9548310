"""A simulated training job: a launcher and N ranks that train together on the simulated CUDA and NCCL libraries."""
