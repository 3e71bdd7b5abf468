"""One folder a family, one file a command; small groups of tools are one file each."""
