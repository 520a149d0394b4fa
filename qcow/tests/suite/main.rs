//! The engine with images in files and in simulated worlds, beside QEMU's tools. One program: it is linked once, and its tests run side by
//! side. Those that change their whole process, or need another build, are programs of their own beside this folder.

#[path = "../common/bitmap_bits.rs"]
mod bitmap_bits;
#[path = "../common/closing.rs"]
mod closing;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/cut_bench.rs"]
mod cut_bench;
#[path = "../common/sectors.rs"]
mod sectors;
#[path = "../common/snapshot_bench.rs"]
mod snapshot_bench;
#[path = "../common/snapshot_content.rs"]
mod snapshot_content;
#[path = "../common/snapshot_shapes.rs"]
mod snapshot_shapes;
#[path = "../common/steps.rs"]
mod steps;
#[path = "../common/used_clusters.rs"]
mod used_clusters;
#[path = "../common/workers.rs"]
mod workers;

mod bitmap_changes;
mod bitmap_cuts;
mod bitmap_races;
mod bitmap_worlds;
mod bitmaps;
mod block_devices;
mod chains;
mod compact;
mod compact_compressed;
mod compact_races;
mod compact_snapshots;
mod compact_threads;
mod compact_worlds;
mod cryptsetup;
mod data_file_worlds;
mod data_files;
mod encryption;
mod encryption_worlds;
mod failed_opens;
mod grace;
mod grow;
mod grow_races;
mod grow_worlds;
mod guards;
mod interop;
mod kept_bitmaps;
mod key_worlds;
mod overlay;
mod raw_backing;
mod refcount_table;
mod repair_cuts;
mod request_memory;
mod reuse;
mod reuse_races;
mod shipped_bugs;
mod shrink;
mod shrink_races;
mod shrink_worlds;
mod snapshot_apply;
mod snapshot_apply_races;
mod snapshot_bounds;
mod snapshot_export;
mod snapshot_races;
mod snapshot_worlds;
mod subcluster_races;
mod subclusters;
mod table_memory;
mod worlds;
