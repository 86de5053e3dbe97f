"""A run as a whole: how it starts, resumes, reports, fails and stops."""
