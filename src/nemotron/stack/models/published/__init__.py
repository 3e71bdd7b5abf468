"""The published models: presets, their sizes in parameters and bytes, model directories in Hugging Face layout."""
