"""Who owns which KV block: layout of a pool, content names of blocks, and the block manager.

Pure Python deciders. Nothing here touches KV bytes, starts a thread or asks for the time: the engine and the transfer
layer move bytes where this package says.

* `layout`: the byte maths of a pool, and whether two pools can exchange blocks.
* `block_hash`: the name of a block's content, the same in every process.
* `block_manager`: sequences and their block tables over a pool with a prefix cache. `block_pool` (who holds each
  block), `prefix_index` (which content is where, what is evicted next) and `integrity` (the audit) are its parts.
"""
