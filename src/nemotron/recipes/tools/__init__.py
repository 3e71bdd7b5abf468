"""Scripts that belong to no stage: talk to a model, write the report."""
