"""Make one page of what a run's records say.

    write_report([Path("runs/my-run")])      # ReadingError: one sentence

``axis`` puts any number of steps into a few hundred bins without losing what stands out; ``figures``, ``heat`` and
``tables`` choose what is shown, ``svg`` draws, ``page`` fills ``page.html``. The page needs no network: style and
script stand in it, and its content-security policy admits these two alone, by their hashes.
"""

from ds_silent.runs.report.page import page_of, write_report

__all__ = ["page_of", "write_report"]
