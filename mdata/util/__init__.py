"""Files written so that nothing looks finished before it is, keys for random draws, threads, limits of the machine,
signals."""
