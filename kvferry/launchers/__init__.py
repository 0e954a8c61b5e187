"""Where a cluster's processes run: this host (`local.py`) or a Ray cluster (`ray.py`), behind one `Launcher`
(`launcher.py`). All start the same command lines, which `kvferry/cluster_spec.py` makes."""
