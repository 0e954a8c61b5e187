"""Who runs now, who waits and who is turned away: places, the fair queue, the forecast of KV, shedding."""
