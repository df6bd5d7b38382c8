"""Plan a job: find the due rows, and the reasons why they are due."""
