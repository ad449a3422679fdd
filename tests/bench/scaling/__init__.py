"""What building costs: workers, driver, memory, and the same work done by others.

workers  5,000 photos built serially, by a Ray of its own and on a cluster that is joined, with 1
         and with 2 workers in turns: CPU time of the tasks, as they tell and as the machine does
driver   the driver's own CPU time, at 1,000 shards of 5, 25 and 100 photos
plan     the driver alone with a million samples: what the first task waits for, and its memory
memory   what a worker holds at most, with ordinary photos and with the largest allowed
peers    the same photos through Ray Data and img2dataset: CPU time of all processes
"""
