"""The ranks of a job: launching, meeting, interfaces, and what happens when one of them hangs or dies."""
