"""Make one page of what a run's records say.

    write_report([Path("runs/my-run")])      # ReadingError: one sentence

The page needs no network: style and script stand in it, and its content-security policy admits these two alone.
"""

from ds_silent.runs.report.page import page_of, write_report

__all__ = ["page_of", "write_report"]
