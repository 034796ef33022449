"""What is counted while jobs are performed, and what is read of it: rates, lags, lengths of performs."""
