"""Send events as short messages to a webhook, by mail, to a command or to an experiment tracker.

An event passes four files: ``sink`` chooses and queues it, ``message`` words it, ``destination`` knows where it goes,
``senders`` sends it.
"""
