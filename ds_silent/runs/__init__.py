"""A run's records, read back for people: tolerant of whatever stands in the files, and with bounded memory.

    run = read_run("runs/my-run")            # everything; for a report
    reader = RunReader("runs/my-run")        # the same, as the files grow; for a live view
    while reader.poll(): ...
    verdict_of(reader.run).sentence          # who, where, since when

Nothing here needs torch, and nothing writes.
"""

from ds_silent.runs.run import Run, RunReader, read_run
from ds_silent.runs.verdict import Check, Verdict, checks_of, verdict_of

__all__ = ["Check", "Run", "RunReader", "Verdict", "checks_of", "read_run", "verdict_of"]
