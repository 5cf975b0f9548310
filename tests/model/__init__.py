"""A model of jobs that block: simulated ranks, one injected fault, and whom the diagnosis names."""
