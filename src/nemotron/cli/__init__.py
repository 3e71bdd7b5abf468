"""The `nemotron` command. One file a command under `commands/`; it starts recipe scripts and never imports them."""
