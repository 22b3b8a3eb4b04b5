"""The training loop that resumes, and what makes a resumed run the same run. Read `track.py` first."""
