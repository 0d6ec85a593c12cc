import random

from control_plane.scheduling.order_queue import OrderQueue


def test_order_queue_gives_items_by_key_when_others_were_removed():
    rng = random.Random(3)
    queue: OrderQueue[str] = OrderQueue()
    left: dict[str, tuple[int, int]] = {}
    for number in range(500):
        key, item = (rng.randrange(20), number), f"item {number}"
        queue.push(key, item)
        left[item] = key
        if rng.random() < 0.4:
            gone = rng.choice(sorted(left))
            assert queue.discard(gone)
            del left[gone]
    order = []
    while (item := queue.first()) is not None:
        assert queue.discard(item)
        order.append(item)
    assert order == sorted(left, key=left.__getitem__)


def test_order_queue_keeps_no_removed_items_when_thousands_are_removed():
    queue: OrderQueue[int] = OrderQueue()
    queue.push(0, -1)
    for number in range(10_000):
        queue.push(number + 1, number)
        queue.discard(number)
    assert len(queue) == 1
    assert len(queue._heap) < 100


def test_order_queue_finds_an_item_under_its_new_key_when_it_was_pushed_again():
    queue: OrderQueue[str] = OrderQueue()
    queue.push((1,), "a")
    queue.push((2,), "b")
    queue.discard("a")
    queue.push((3,), "a")
    assert queue.first() == "b"
    queue.discard("b")
    assert queue.first() == "a"
    assert not queue.discard("b")
