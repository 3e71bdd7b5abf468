"""`python -m nemotron` is the `nemotron` command."""

from nemotron.cli.entry import main

if __name__ == "__main__":
    main()
