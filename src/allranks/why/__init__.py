"""From the logs of any job to the culprit: `allranks why`. Read `blame.py` first."""
