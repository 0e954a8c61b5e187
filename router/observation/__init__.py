"""What the router shows of itself: metrics, traces, the access log, requests under way, the live page."""
