"""Nemotron 3.5 Lightning: configs alone, over the scripts of nano3 and super3."""
