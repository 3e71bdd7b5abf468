"""Nemotron 3 Super: what is new in it beside Nano, and the configs of what is not; one folder a stage."""
