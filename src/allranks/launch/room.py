"""How much room has this node's run directory, and what is kept back in it? A thread that asks every few seconds.

    with RoomWatch(run_dir, node_path, job) as rooms:
        rooms.seen()                          the latest answer: goes into the node's beats
        rooms.look(within_s=0.05)             asks now: a worker has failed, perhaps for want of room
        rooms.make_room(within_s=1.0)         a write of our own has failed: give the ballast back

The thread owns the ballast (report.ballast): it takes it soon after the workers' start, gives it back when the disk is
full, and takes it again when there is room again. Whatever it calls may hang with the file system, so nobody waits for
it longer than he says, and its end is not waited for either: the kernel gives the blocks back.
"""
