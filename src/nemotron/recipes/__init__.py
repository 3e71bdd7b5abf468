"""One folder a family, one a stage, one script a step."""
