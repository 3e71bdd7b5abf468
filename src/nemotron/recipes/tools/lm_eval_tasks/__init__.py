"""Our verifiable tasks as tasks of lm-eval: the folder for its `--include_path`."""
