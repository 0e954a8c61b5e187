from runtime.restart_wait import RestartWait


def test_waits_double_up_to_the_longest() -> None:
    wait = RestartWait(first_s=0.5, longest_s=3.0)
    assert [wait.after(0.1) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_after_a_healthy_life_the_wait_is_the_first_again() -> None:
    wait = RestartWait(first_s=0.5, longest_s=15.0, healthy_life_s=60.0)
    assert [wait.after(lived_s) for lived_s in (1.0, 1.0, 59.9, 60.0, 1.0)] == [0.5, 1.0, 2.0, 0.5, 1.0]
