"""DeepSpeed's adapter: the only folder that touches its inside.

``attach_deepspeed.py`` is the way in, ``engine.py`` hooks one engine's step; the others say where its optimizers keep
what. Every touch of an internal says what it relies on; all were read in 0.16.9 and 0.19.8. What only reads a
configuration (``refusals.py``, ``own_config.py``), and ``state.py``, are imported without DeepSpeed too.
"""
