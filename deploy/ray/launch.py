"""Start a kvferry cluster in the Ray cluster that this machine is a node of, and leave it running.

    ray submit deploy/ray/cluster.yaml deploy/ray/launch.py --model smollm2-135m-instruct --prefill 1 --decode 2

The flags are those of `kvferry up --ray`. `kvferry status --ray`, `scale --ray` and `down --ray` do the rest, from any
node.
"""

import sys

from kvferry.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["up", "--ray", "--detach", *sys.argv[1:]]))
