"""Data preparation: sources -> curation -> tokenise -> blend or pack -> split. Holds no torch and knows no task."""
