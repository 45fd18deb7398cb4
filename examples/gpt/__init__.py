"""A small GPT, read top to bottom: ``model.py``, ``module.py``, ``data.py``.

Nothing in this package knows about ranks. What makes it train in parallel is the strategy that
``examples/train.py`` hands to the Trainer.
"""
