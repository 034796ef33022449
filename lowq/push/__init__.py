"""Jobs in: pushes are validated, encoded, combined into writes, and sent again where they were refused."""
