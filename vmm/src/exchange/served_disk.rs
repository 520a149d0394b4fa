//! One disk that is served, and what an operator can do with it whatever the frontend.
//!
//! The work is done on the thread of whoever asks, with plain system calls: the workers of the disk go on.
//!
//! Invariant: an image is closed only when no request of an operator and no compaction works on it.
//! [`ServedDisk::detach`] waits for that, and nothing begins after it.

use std::path::PathBuf;
use std::sync::Arc;

use block::ring::RingKind;
use block::throttle::RateLimits;
use block::{Buffer, Context, DiskInfo, Op, ask};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use qcow::{BitmapChange, EngineCounts, QcowDisk, SnapshotError};
use serde_json::{Value, json};
use virtio_devices::stats::{DiskSnapshot, DiskStats};

use super::compaction::Compactions;
use crate::disk_config::{DiskConfig, GroupMember, rate};
use crate::error::chain;
use crate::open::{DiskHandle, OpenedDisk, OpenedImage};
use crate::shrink;
use crate::snapshots::ServedSnapshots;

/// A disk that is served, while its image is open and while it is not.
#[derive(Debug)]
pub(crate) struct ServedDisk {
    /// The disk, for people.
    label: String,
    path: PathBuf,
    queues: u16,
    /// `true` if another program serves it, and this one only passes requests on.
    is_foreign: bool,
    /// Its place in the group whose rate limits it shares.
    group: Mutex<Option<GroupMember>>,
    /// The rate limits that an operator has set since the start, which stay when the image is opened again.
    limits: Mutex<Option<RateLimits>>,
    /// Read-locked while a request works on the image; `None` while the image is closed.
    open: RwLock<Option<DiskHandle>>,
    shown: Mutex<Shown>,
    /// Of its queues; `None` if another program serves it.
    stats: Option<Arc<DiskStats>>,
    pub(super) compactions: Compactions,
}

/// The properties that lists show, as last known.
#[derive(Clone, Copy, Debug, Default)]
struct Shown {
    size: u64,
    readonly: bool,
    is_qcow2: bool,
}

impl ServedDisk {
    /// Returns the disk of `config`, whose image is not open yet and whose queues count in `stats`. Errors call it `label`.
    pub(crate) fn new(label: String, config: &DiskConfig, stats: &Arc<DiskStats>) -> Arc<Self> {
        Arc::new(Self {
            stats: (!config.vhost_user).then(|| Arc::clone(stats)),
            label,
            path: config.path.clone(),
            queues: config.num_queues,
            is_foreign: config.vhost_user,
            group: Mutex::new(config.rate_limit_group.clone()),
            limits: Mutex::default(),
            open: RwLock::default(),
            shown: Mutex::default(),
            compactions: Compactions::default(),
        })
    }

    /// As [`ServedDisk::new`], with an image that is open.
    pub(crate) fn of(
        label: String,
        config: &DiskConfig,
        stats: &Arc<DiskStats>,
        opened: &OpenedDisk,
    ) -> Arc<Self> {
        let disk = Self::new(label, config, stats);
        disk.attach(opened);
        disk
    }

    /// Lets the disk have the rate limits of this configuration when its image is opened the next time, in place of those that an
    /// operator has set.
    pub(crate) fn forget_limits(&self, config: &DiskConfig) {
        self.group.lock().clone_from(&config.rate_limit_group);
        *self.limits.lock() = None;
    }

    /// Another process has the image, which looks like this.
    pub(crate) fn expect(&self, info: DiskInfo, is_qcow2: bool) {
        *self.shown.lock() = Shown {
            size: info.size_bytes,
            readonly: info.read_only,
            is_qcow2,
        };
    }

    /// The image is open: requests work on it from now on.
    pub(crate) fn attach(&self, opened: &OpenedDisk) {
        let handle = opened.handle();
        if let Some(limits) = &*self.limits.lock() {
            handle.limits(Some(limits));
        }
        *self.open.write() = Some(handle);
        self.compactions.open();
    }

    /// Stops the compaction, if one is under way, and returns when nothing here works on the image any more. Call it before the
    /// image is closed, and without locks that requests wait for.
    pub(crate) fn detach(&self) {
        self.describe();
        self.compactions.close();
        *self.open.write() = None;
    }

    /// Asks a compaction to end soon, as [`ServedDisk::detach`] does, and does not wait for that.
    pub(crate) fn prepare_to_detach(&self) {
        self.compactions.close();
    }

    /// The image is not closed after all.
    pub(crate) fn stay_attached(&self) {
        self.compactions.open();
    }

    /// Does something with the open disk, which is not closed meanwhile.
    pub(super) fn with<T>(&self, work: impl FnOnce(&DiskHandle) -> Result<T, String>) -> Result<T, String> {
        if self.is_foreign {
            return Err(format!(
                "{} is served by another program (vhost_user=on), which has its image",
                self.label
            ));
        }
        // Fails while somebody waits to close it.
        let open = self.open.try_read();
        match open.as_ref().and_then(|open| open.as_ref()) {
            Some(handle) => work(handle),
            None => Err(self.closed()),
        }
    }

    fn closed(&self) -> String {
        format!("{}: {}", self.label, chain(&SnapshotError::Closed))
    }

    /// Does something with the QCOW2 image.
    pub(super) fn with_image<T>(
        &self,
        what: &str,
        work: impl FnOnce(&OpenedImage) -> Result<T, String>,
    ) -> Result<T, String> {
        self.with(|handle| match handle.image() {
            Some(image) => work(image),
            None => Err(format!(
                "{} has a raw image; only QCOW2 images {what}",
                self.label
            )),
        })
    }

    /// Returns what its queues have counted; `None` if another program serves it, which counts.
    pub(super) fn statistics(&self) -> Option<DiskSnapshot> {
        self.stats.as_ref().map(|stats| stats.snapshot())
    }

    /// Returns what the engine of its QCOW2 image has done since that was opened; `None` while it is closed, and of other disks.
    pub(crate) fn engine_counts(&self) -> Option<EngineCounts> {
        let counts = self.with(|handle| Ok(handle.image().and_then(|image| image.with(QcowDisk::counts))));
        counts.ok().flatten()
    }

    pub(super) fn label(&self) -> &str {
        &self.label
    }

    /// Returns what lists show of the disk; as last known, while its image is closed.
    pub(super) fn describe(&self) -> Value {
        let now = self.with(|handle| {
            let info = handle.with(|disk| disk.info()).ok_or_else(|| self.closed())?;
            Ok(Shown {
                size: info.size_bytes,
                readonly: info.read_only,
                is_qcow2: handle.image().is_some(),
            })
        });
        let (mut shown, is_open) = (self.shown.lock(), now.is_ok() || self.is_foreign);
        if let Ok(now) = now {
            *shown = now;
        }
        let format = match *shown {
            _ if self.is_foreign => "none",
            Shown { is_qcow2: true, .. } => "qcow2",
            _ => "raw",
        };
        let mut described = json!({
            "path": self.path,
            "format": format,
            "size": shown.size,
            "readonly": shown.readonly,
            "queues": self.queues,
            "open": is_open,
        });
        drop(shown);
        if let Some(compaction) = self.compactions.describe() {
            described["compaction"] = compaction;
        }
        described
    }

    /// Makes every write that was answered before durable. An image that nothing was written to takes no sync.
    pub(crate) fn flush(&self) -> Result<Value, String> {
        let failed = |error: String| format!("cannot flush {}: {error}", self.label);
        self.with(|handle| {
            let flushed = handle.with(|disk| {
                let cx = Context::new(RingKind::Syscalls, 64).map_err(|error| chain(&error))?;
                let queue = disk.open_queue(&cx).map_err(|error| chain(&error))?;
                let done = cx.block_on(ask(&*queue, Op::Flush, 0, 0, Buffer::default()));
                done.map_err(|error| format!("cannot wait for I/O: {error}"))?
                    .map_err(|error| chain(&error))
            });
            flushed.ok_or_else(|| self.closed())?.map_err(failed)
        })?;
        Ok(json!({}))
    }

    /// Sets the disk's rate limits, if `limits` says which. Answers those that it has then.
    pub(crate) fn limits(&self, limits: Option<&RateLimits>) -> Result<Value, String> {
        if let (Some(_), Some(group)) = (limits, &*self.group.lock()) {
            return Err(format!(
                "{} shares the limits of the group {} with other disks; `group-limits` gives them others",
                self.label,
                group.id()
            ));
        }
        self.with(|handle| {
            // Held, so that an image that is opened meanwhile has the same.
            let mut set = self.limits.lock();
            let now = handle.limits(limits).ok_or_else(|| self.closed())?;
            if limits.is_some() {
                *set = Some(now);
            }
            Ok(json!({ "limits": rate::to_json(&now) }))
        })
    }

    /// Sets the rate limits of `group`, if the disk is in it and `limits` says which. Returns those that it has then; `None`
    /// if the disk is in another group, or in none.
    pub(crate) fn limits_of_group(&self, group: &str, limits: Option<&RateLimits>) -> Option<RateLimits> {
        let limiter = {
            let member = self.group.lock();
            let member = member.as_ref().filter(|member| member.id() == group)?;
            Arc::clone(member.limiter()?)
        };
        if let Some(limits) = limits {
            limiter.set(limits);
            // Requests that wait have to ask again. One whose image is closed has none.
            let _closed = self.with(|handle| Ok(handle.limits(Some(limits))));
        }
        Some(limiter.limits())
    }

    /// Returns the id of the group whose rate limits it shares.
    pub(crate) fn group(&self) -> Option<String> {
        self.group.lock().as_ref().map(|member| member.id().to_owned())
    }

    /// Begins a change of size: makes the disk smaller if `size` is less than it has, which takes `force`. Its frontend has to make
    /// it larger, and to notify its user, while the guard is held. One that another program serves is left to the frontend.
    pub(crate) fn change(&self, size: u64, force: bool) -> Result<RwLockReadGuard<'_, ()>, String> {
        let alone = self.not_compacting()?;
        if !self.is_foreign {
            self.with(|handle| {
                let now = handle.with(|disk| disk.info().size_bytes);
                let now = now.ok_or_else(|| self.closed())?;
                shrink::shrink_to(now, handle.image(), size, force)
            })?;
        }
        Ok(alone)
    }

    /// Makes the disk as large as `size`. Its frontend must notify its user. Returns its size.
    pub(crate) fn grow_to(&self, size: u64) -> Result<u64, String> {
        self.with(|handle| {
            let grown = handle.with(|disk| {
                let cx = Context::new(RingKind::Syscalls, 64).map_err(|error| chain(&error))?;
                let done = cx.block_on(Arc::clone(&disk).resize(&cx, size));
                done.map_err(|error| format!("cannot wait for I/O: {error}"))?
                    .map_err(|error| chain(&error))?;
                Ok(disk.info().size_bytes)
            });
            grown.ok_or_else(|| self.closed())?
        })
    }

    /// Creates a snapshot of the disk as it is. Answers its ID.
    pub(crate) fn create_snapshot(&self, name: &str) -> Result<Value, String> {
        let _alone = self.not_compacting()?;
        self.snapshots(|snapshots| snapshots.create(name))
    }

    /// Lists the snapshots.
    pub(crate) fn list_snapshots(&self) -> Result<Value, String> {
        self.snapshots(|snapshots| snapshots.list())
    }

    /// Makes the disk what it was when a snapshot was created.
    pub(crate) fn apply_snapshot(&self, snapshot: &str, force: bool) -> Result<Value, String> {
        let _alone = self.not_compacting()?;
        self.snapshots(|snapshots| snapshots.apply(snapshot, force))
    }

    /// Deletes a snapshot.
    pub(crate) fn delete_snapshot(&self, snapshot: &str) -> Result<Value, String> {
        let _alone = self.not_compacting()?;
        self.snapshots(|snapshots| snapshots.delete(snapshot))
    }

    /// Lists the persistent bitmaps.
    pub(crate) fn list_bitmaps(&self) -> Result<Value, String> {
        let failed = |error: String| format!("cannot list the bitmaps of {}: {error}", self.label);
        self.with_image("have bitmaps", |image| {
            let list = image
                .run(async |disk, cx| disk.bitmaps(cx).await)
                .map_err(failed)?;
            serde_json::to_value(list).map_err(|error| failed(error.to_string()))
        })
    }

    /// Changes a persistent bitmap. Requests to the disk wait meanwhile.
    pub(crate) fn change_bitmap(&self, name: &str, change: &BitmapChange) -> Result<Value, String> {
        let _alone = self.not_compacting()?;
        self.with_image("have bitmaps", |image| {
            let changed = image.run(async |disk, cx| disk.change_bitmap(cx, name, change).await);
            changed.map_err(|error| format!("cannot change a bitmap of {}: {error}", self.label))
        })?;
        tracing::info!(event = "bitmap-changed", disk = %self.label, name, ?change, "changed a bitmap");
        Ok(json!({}))
    }

    fn snapshots(
        &self,
        work: impl FnOnce(&ServedSnapshots<'_>) -> Result<Value, String>,
    ) -> Result<Value, String> {
        self.with_image("have snapshots", |image| {
            work(&ServedSnapshots::new(&self.label, image))
        })
    }

    /// Refuses changes of the image as a whole while it is compacted.
    fn not_compacting(&self) -> Result<RwLockReadGuard<'_, ()>, String> {
        self.compactions.keep_off().ok_or_else(|| {
            format!(
                "{} is being compacted; wait for the end, or stop it with `compact-stop`",
                self.label
            )
        })
    }
}
