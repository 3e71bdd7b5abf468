"""Nemotron Nano 2, the tutorial: data_curation.py, training.py and evaluation.py in each stage, joined by a pipe."""
