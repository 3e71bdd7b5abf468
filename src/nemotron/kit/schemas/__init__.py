"""Groups of config keys that stages share: a file a theme, pydantic only, so that a dry run needs no torch.

A stage's schema imports the groups that it needs and states what is its own by subclassing: defaults, where a number
comes from, narrower ranges, further keys. A default stands here only where it holds for every model family.
"""
