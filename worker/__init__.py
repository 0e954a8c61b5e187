"""What a worker process is, whatever its role: its options, what it loads once, and how it goes from role to role."""
