// The body of a kernel's launch: all blocks of the grid, one after the other. ptx.py defines the words in capitals.
    u32 threads = launch->block[0] * launch->block[1] * launch->block[2];
    u32 blocks = launch->grid[0] * launch->grid[1] * launch->grid[2];
    REGISTERS* all = malloc(threads * sizeof *all);
    struct Place here = {.given = launch->given, .size = ARGUMENTS, .room = SHARED + launch->shared, .name = NAME};
    memcpy(here.ntid, launch->block, sizeof here.ntid);
    memcpy(here.nctaid, launch->grid, sizeof here.nctaid);
    here.shared = aligned_alloc(64, (here.room + 127) / 64 * 64);
    here.low[0] = (u64)all, here.high[0] = (u64)(all + threads);
    here.low[1] = (u64)here.shared, here.high[1] = (u64)here.shared + here.room;
    here.low[2] = (u64)here.given, here.high[2] = (u64)here.given + ARGUMENTS;
    here.launch = emulated_watch.launches++;
    u32 first = emulated_watch.last && emulated_watch.last < blocks ? blocks - emulated_watch.last : 0;
    for (u32 i = first; i < blocks; i++) {
        u32 block = launch->backwards ? blocks - 1 - i : i;
        here.ctaid[0] = block % here.nctaid[0];
        here.ctaid[1] = block / here.nctaid[0] % here.nctaid[1];
        here.ctaid[2] = block / here.nctaid[0] / here.nctaid[1];
        memset(here.shared, 0xff, here.room);
        for (u32 t = 0; t < threads; t++) all[t].stop = 0;
        // Until all have ended. Threads that wait do so at one place: elsewhere a GPU's result is undefined.
        here.phase = 0;
        for (int waiting = 0; waiting >= 0; here.phase++) {
            waiting = -1;
            for (u32 j = 0; j < threads; j++) {
                u32 t = launch->backwards ? threads - 1 - j : j;
                if (all[t].stop < 0) continue;
                here.tid[0] = t % here.ntid[0];
                here.tid[1] = t / here.ntid[0] % here.ntid[1];
                here.tid[2] = t / here.ntid[0] / here.ntid[1];
                int stop = all[t].stop = STEP(all + t, &here);
                if (stop < 0) continue;
                if (waiting >= 0 && waiting != stop) wrong(&here, "threads wait at different barriers", 0, 0);
                waiting = stop;
            }
        }
    }
    free(all);
    free(here.shared);
#undef REGISTERS
#undef STEP
#undef NAME
#undef SHARED
#undef ARGUMENTS
