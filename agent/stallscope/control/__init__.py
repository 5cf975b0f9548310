"""What a process that stays is told: its configuration file, and the socket that `stallscope ctl` talks to."""
