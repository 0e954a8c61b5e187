"""The compute of one worker: scheduler, paged KV cache, models and sampler on one owner thread; torch lives here."""
