//! The keys by which two disks differ.

use super::{DiskConfig, TemporaryOverlay};

/// Keys that can take effect at once.
pub(crate) const LIMIT_KEYS: [&str; 2] = ["bw_size", "ops_size"];

/// Keys that take effect when the image is opened, and that a guest does not notice.
pub(crate) const OPENING_KEYS: [&str; 8] = [
    "backing_files",
    "bitmaps",
    "data_file",
    "direct",
    "discard_no_unref",
    "l2_cache",
    "secret_file",
    "werror",
];

impl DiskConfig {
    /// The keys whose values differ between this disk and another one.
    #[must_use]
    pub(crate) fn differences(&self, other: &Self) -> Vec<&'static str> {
        // Whole, so that no key is forgotten.
        let Self {
            path,
            vhost_user,
            image_type,
            readonly,
            snapshot,
            overlay,
            secret_file,
            direct,
            num_queues,
            queue_size,
            id,
            serial,
            queue_affinity,
            backing_files,
            data_file,
            sparse,
            lock_granularity,
            l2_cache_bytes,
            discard_no_unref,
            werror,
            bitmaps,
            poll_us,
            pci,
            rate_limits,
            rate_limit_group,
        } = self;
        let directory = |overlay: &Option<TemporaryOverlay>| overlay.as_ref()?.directory.clone();
        let same = [
            ("path", *path == other.path),
            ("vhost_user", *vhost_user == other.vhost_user),
            ("image_type", *image_type == other.image_type),
            ("readonly", *readonly == other.readonly),
            ("snapshot", *snapshot == other.snapshot),
            ("overlay", overlay.is_some() == other.overlay.is_some()),
            ("overlay_dir", directory(overlay) == directory(&other.overlay)),
            ("secret_file", *secret_file == other.secret_file),
            ("direct", *direct == other.direct),
            ("num_queues", *num_queues == other.num_queues),
            ("queue_size", *queue_size == other.queue_size),
            ("id", *id == other.id),
            ("serial", *serial == other.serial),
            ("queue_affinity", *queue_affinity == other.queue_affinity),
            ("backing_files", *backing_files == other.backing_files),
            ("data_file", *data_file == other.data_file),
            ("sparse", *sparse == other.sparse),
            ("lock_granularity", *lock_granularity == other.lock_granularity),
            ("l2_cache", *l2_cache_bytes == other.l2_cache_bytes),
            ("discard_no_unref", *discard_no_unref == other.discard_no_unref),
            ("werror", *werror == other.werror),
            ("bitmaps", *bitmaps == other.bitmaps),
            ("poll_us", *poll_us == other.poll_us),
            ("pci_device_id", *pci == other.pci),
            ("bw_size", rate_limits.bandwidth == other.rate_limits.bandwidth),
            ("ops_size", rate_limits.ops == other.rate_limits.ops),
            ("rate_limit_group", *rate_limit_group == other.rate_limit_group),
        ];
        same.iter()
            .filter(|(_, same)| !same)
            .map(|(key, _)| *key)
            .collect()
    }
}
