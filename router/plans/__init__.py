"""From the fields of a request, whichever door it came by, to what the cluster is asked to generate."""
