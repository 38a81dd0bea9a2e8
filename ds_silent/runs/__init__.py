"""Read a run's records back: tolerant of whatever stands in the files, and with bounded memory.

    run = read_run("runs/my-run")            # everything; for a report
    reader = RunReader("runs/my-run")        # the same, as the files grow; for a live view
    while reader.poll(): ...
    verdict_of(reader.run).sentence          # who, where, since when

Nothing here needs torch, and nothing but the report's page is written.
"""

from ds_silent.runs.run import RunReader, RunRecords, read_run
from ds_silent.runs.verdict import Check, RunVerdict, checks_of, verdict_of

__all__ = ["Check", "RunReader", "RunRecords", "RunVerdict", "checks_of", "read_run", "verdict_of"]
