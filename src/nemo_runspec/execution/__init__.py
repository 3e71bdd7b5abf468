"""Low-level pieces of running: local subprocess and torchrun, exit codes. Command files say what runs where."""
