"""What happens to jobs, for people and other programs: counts, histories, events, error groups, what is exported."""
