"""Whoever is asleep is told: events as short messages to a webhook, by e-mail, to a command or a tracker.

    alerts = open_alerts(config.alerts, run=lambda: "runs/my-run")   # ds_silent.alerts.sink; on the writing rank
    alerts.write_event(event)                                        # queued; each destination has a thread that sends
    alerts.close()                                                   # waits delivery.END seconds at most

The senders are small ones of our own, on the standard library. Those of apprise (2.2) were read: it writes the whole
address of a webhook, its token included, into its debug log; it answers True or False, so that a Retry-After is lost,
and whether a repetition can help; its time-outs start anew with every byte; and every rank 0 would need it.
"""
