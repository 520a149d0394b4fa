//! The vhost-user messages of one client.
//!
//! The `vhost` crate checks a message's form and answers it; this module checks its content and executes it.
//! A refusal that can be answered is a [`MessageError::ReqHandlerError`]; if the message's answer
//! has no room for a refusal the error is another, and the client is disconnected.

use std::fs::File;
use std::io;
use std::sync::Arc;

use block::worker::{WorkerGone, WorkerHandle};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error as MessageError, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};

use super::config_channel::ConfigChannel;
use super::device_state;
use super::image::Image;
use super::inflight::{self, InflightMemory};
use super::log_memory::LogMemory;
use super::memory::{ClientMemory, REGIONS_MAX, RegionInfo};
use super::vring::{ClientParts, Vring, VringError};
use crate::blk::{BlockDevice, CacheMode, FlushError, RunQueueError};
use crate::virtqueue::{RingAddresses, SetupError};

mod image;

/// One client's device.
pub(super) struct Backend {
    pub(super) device: Arc<BlockDevice>,
    workers: Arc<[Arc<WorkerHandle>]>,
    /// As many as there are workers.
    pub(super) vrings: Vec<Vring>,
    pub(super) memory: ClientMemory,
    /// True if inflight tracking is offered.
    restartable: bool,
    pub(super) inflight: Option<InflightMemory>,
    /// The log of the guest pages that queues write, from before the client asks for logging.
    pub(super) log: Option<LogMemory>,
    pub(super) features: u64,
    pub(super) protocol: VhostUserProtocolFeatures,
    /// True if it was logged that the client's cache mode is not known.
    mode_reported: bool,
    worker_gone: bool,
    pub(super) channel: ConfigChannel,
    /// The image, if it can be given to another server: then guests can migrate.
    image: Option<Arc<Image>>,
    /// True if a queue is to run and the image is not open yet.
    waits_for_image: bool,
    /// The pipe into which the client writes the state of an earlier server, until it asks whether that is well.
    state: Option<File>,
}

/// Error: a client accepted features that were not offered to it.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum NotOffered {
    /// Bits of `SET_FEATURES`.
    #[error("feature bits {0:#x} were not offered")]
    Features(u64),
    /// Bits of `SET_PROTOCOL_FEATURES`.
    #[error("protocol feature bits {0:#x} were not offered")]
    ProtocolFeatures(u64),
}

/// Refuses what a message asks, with an answer.
fn refuse(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> MessageError {
    MessageError::ReqHandlerError(io::Error::other(error))
}

fn region_info(region: &VhostUserMemoryRegion) -> RegionInfo {
    RegionInfo {
        guest: region.guest_phys_addr,
        size: region.memory_size,
        user: region.user_addr,
        file_offset: region.mmap_offset,
    }
}

pub(super) const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
/// The pages that are written are marked in the log.
const LOG_ALL: u64 = VhostUserVirtioFeatures::LOG_ALL.bits();

impl Backend {
    pub(super) fn new(
        device: Arc<BlockDevice>,
        workers: Arc<[Arc<WorkerHandle>]>,
        restartable: bool,
        channel: ConfigChannel,
        image: Option<Arc<Image>>,
    ) -> Self {
        Self {
            vrings: workers.iter().map(|_| Vring::new()).collect(),
            device,
            workers,
            memory: ClientMemory::default(),
            restartable,
            inflight: None,
            log: None,
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            mode_reported: false,
            worker_gone: false,
            channel,
            image,
            waits_for_image: false,
            state: None,
        }
    }

    /// Returns true if the client expects an answer to a refused message.
    pub(super) fn answers_errors(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// Returns true if a worker has ended.
    pub(super) fn worker_gone(&self) -> bool {
        self.worker_gone
    }

    /// Drains all queues. Each is stopped even if another's worker has ended.
    pub(super) fn disconnect(&mut self) -> std::result::Result<(), WorkerGone> {
        let stopped = self.stop_all();
        self.settle_image();
        self.channel.forget();
        self.memory = ClientMemory::default();
        self.log = None;
        self.waits_for_image = false;
        if self.worker_gone {
            return Err(WorkerGone);
        }
        stopped
    }

    /// The client is told nothing more.
    pub(super) fn forget_channel(&self) {
        self.channel.forget();
    }

    fn offered(&self) -> u64 {
        let logs = if self.image.is_some() { LOG_ALL } else { 0 };
        self.device.features() | PROTOCOL_FEATURES | logs
    }

    /// Drains all queues; they keep their places.
    pub(super) fn stop_all(&mut self) -> std::result::Result<(), WorkerGone> {
        let mut result = Ok(());
        for (vring, worker) in self.vrings.iter_mut().zip(&*self.workers) {
            result = result.and(vring.stop(worker));
        }
        self.worker_gone |= result.is_err();
        result
    }

    /// Starts every queue that should run. Failures are only logged.
    pub(super) fn start_all(&mut self) -> Result<()> {
        for index in 0..self.vrings.len() {
            if let Err(error) = self.start(index) {
                if self.worker_gone {
                    return Err(error);
                }
                if let Some(held_back) = self.device.log_limit().admit() {
                    tracing::warn!(queue = index, %error, held_back, "a queue cannot run with the client's memory");
                }
            }
        }
        Ok(())
    }

    fn start(&mut self, index: usize) -> Result<()> {
        let (Some(vring), Some(worker)) = (self.vrings.get_mut(index), self.workers.get(index)) else {
            return Err(refuse(format!("there is no queue {index}")));
        };
        if !vring.is_to_run() {
            return Ok(());
        }
        if !image::fetch(self.image.as_deref(), &self.device, &mut self.waits_for_image) {
            return Ok(());
        }
        // A client may accept all that is offered, and never log.
        let log = self.log.as_ref().filter(|_| self.features & LOG_ALL != 0);
        let inflight = self.inflight.as_ref();
        let region = inflight.and_then(|memory| memory.region(index, vring.is_to_recover()));
        // As many queues as messages can number.
        let stats = self.device.stats().queue(index as u16);
        let client = ClientParts {
            memory: &self.memory,
            inflight: region,
            log,
            features: self.features,
            stats,
        };
        let started = vring.start(worker, &self.device, client);
        started.map_err(|error| {
            self.worker_gone |= matches!(error, VringError::Run(RunQueueError::Worker(_)));
            refuse(error)
        })?;
        self.report_unknown_mode(index);
        Ok(())
    }

    /// Logs once that writes are slow because the client's cache mode is not known.
    fn report_unknown_mode(&mut self, index: usize) {
        let runs = self.vrings.get(index).is_some_and(Vring::is_running);
        if !runs || self.mode_reported || !self.device.is_slowed_by_unknown_mode(self.features) {
            return;
        }
        self.mode_reported = true;
        if let Some(held_back) = self.device.log_limit().admit() {
            tracing::warn!(
                held_back,
                "the client reconnected without its guest's cache mode: every write is made durable, as for \
                 write-through; start the server with --restartable to keep the mode"
            );
        }
    }

    /// Notes the cache mode for the server that follows this one.
    pub(super) fn note_cache_mode(&self) {
        let mode = self.device.cache_mode();
        if let Some(inflight) = &self.inflight
            && mode != CacheMode::Unknown
            && mode != inflight.cache_mode()
        {
            inflight.note_cache_mode(mode);
        }
    }

    fn stop(&mut self, index: usize) -> Result<&mut Vring> {
        self.end(index, Vring::stop)
    }

    fn end(
        &mut self,
        index: usize,
        end: impl FnOnce(&mut Vring, &WorkerHandle) -> std::result::Result<(), WorkerGone>,
    ) -> Result<&mut Vring> {
        let (Some(vring), Some(worker)) = (self.vrings.get_mut(index), self.workers.get(index)) else {
            return Err(refuse(format!("there is no queue {index}")));
        };
        if let Err(error) = end(vring, worker) {
            self.worker_gone = true;
            return Err(refuse(error));
        }
        Ok(vring)
    }

    /// Changes a queue while it does not run. If it then cannot run it needs a new kick, so that the
    /// messages that put it right are not refused for what they have yet to change.
    fn change(&mut self, index: u32, change: impl FnOnce(&mut Vring)) -> Result<()> {
        let index = index as usize;
        change(self.stop(index)?);
        let started = self.start(index);
        if started.is_err()
            && let Some(vring) = self.vrings.get_mut(index)
        {
            vring.forget_kick();
        }
        started
    }

    fn vring(&self, index: u8) -> Result<&Vring> {
        let vring = self.vrings.get(usize::from(index));
        vring.ok_or_else(|| refuse(format!("there is no queue {index}")))
    }

    /// Exchanges the memory while no queue runs: when this returns, nothing touches the old one.
    fn set_memory(&mut self, memory: ClientMemory) -> Result<()> {
        self.stop_all().map_err(refuse)?;
        self.memory = memory;
        self.start_all()
    }

    /// Makes durable what was answered before.
    fn flush(&mut self) -> Result<()> {
        let is_elsewhere = self.image.as_ref().is_some_and(|image| image.is_elsewhere());
        let Some(worker) = self.workers.first().filter(|_| !is_elsewhere) else {
            return Ok(());
        };
        crate::blk::flush(worker, self.device.disk()).map_err(|error| {
            self.worker_gone |= matches!(error, FlushError::Worker(_));
            refuse(error)
        })
    }
}

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    // Not used any more; the specification lets it be ignored.
    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all().map_err(refuse)?;
        self.vrings.iter_mut().for_each(Vring::reset);
        self.inflight = None;
        self.log = None;
        self.features = 0;
        // The cache mode stays: a client (QEMU) may answer its guest from a copy of the configuration that it read
        // long ago, so the guest would not see the mode change.
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.offered();
        if unknown != 0 {
            return Err(refuse(NotOffered::Features(unknown)));
        }
        if features == self.features {
            return Ok(());
        }
        self.stop_all().map_err(refuse)?;
        if self.features & LOG_ALL != 0 && features & LOG_ALL == 0 {
            self.log = None;
        }
        self.features = features;
        if features & PROTOCOL_FEATURES == 0 {
            // Without the message that enables queues they all are.
            self.vrings.iter_mut().for_each(|vring| vring.set_enabled(true));
        }
        self.start_all()
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let regions = regions.iter().map(region_info).zip(files).collect();
        self.set_memory(ClientMemory::new(regions).map_err(refuse)?)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).ok().filter(|size| size.is_power_of_two());
        let size = size.ok_or_else(|| refuse(SetupError::Size { size: num }))?;
        self.change(index, |vring| vring.set_size(size))
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let addresses = RingAddresses {
            descriptors: descriptor,
            available,
            used,
        };
        let log = flags
            .contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG)
            .then_some(log);
        self.change(index, |vring| vring.set_addresses(addresses, log))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let refusal = || refuse(format!("the base {base} of queue {index} is larger than 65535"));
        let base = u16::try_from(base).map_err(|_| refusal())?;
        self.change(index, |vring| vring.set_base(base))
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let carries = VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT;
        let end = if self.protocol.contains(carries) && self.inflight.is_some() {
            Vring::suspend
        } else {
            Vring::stop
        };
        self.settle_image();
        // The answer has no room for a refusal.
        let vring = self
            .end(index as usize, end)
            .map_err(|_| MessageError::InvalidParam)?;
        vring.forget_kick();
        let state = VhostUserVringState::new(index, vring.base().into());
        // A client that heeds the failure ends the migration. The guest of another one waits at the destination.
        self.release_if_migrating()?;
        Ok(state)
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.change(index.into(), |vring| vring.set_kick(fd))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.vring(index)?.set_call(fd);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.vring(index)?.set_error(fd);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let mut offered = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::DEVICE_STATE
            | VhostUserProtocolFeatures::RESET_DEVICE;
        let inflight =
            VhostUserProtocolFeatures::INFLIGHT_SHMFD | VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT;
        offered.set(inflight, self.restartable);
        offered.set(VhostUserProtocolFeatures::LOG_SHMFD, self.image.is_some());
        Ok(offered)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.get_protocol_features()?;
        let unknown = features & !offered.bits();
        if unknown != 0 {
            return Err(refuse(NotOffered::ProtocolFeatures(unknown)));
        }
        self.protocol = VhostUserProtocolFeatures::from_bits_truncate(features);
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.vrings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.change(index, |vring| vring.set_enabled(enable))
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        Ok(self
            .device
            .read_config(offset.into(), size as usize, self.features))
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        let written = self.device.write_config(offset.into(), bytes, self.features);
        let to_flush = written.map_err(refuse)?;
        if self.device.cache_mode() == CacheMode::Writethrough {
            // Before the answer: a kill must not leave a guest in writethrough that the next server does not know of.
            // Writeback is noted after the answer has been sent.
            self.note_cache_mode();
        }
        if to_flush {
            self.flush()?;
        }
        Ok(())
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        Err(refuse("a disk has no GPU socket"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(MessageError::InvalidOperation("a disk has no shared objects"))
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        inflight::make(asked, self.vrings.len()).map_err(|error| {
            if let Some(held_back) = self.device.log_limit().admit() {
                tracing::warn!(%error, held_back, "cannot provide inflight memory to a client");
            }
            // The answer has no room for a refusal.
            MessageError::InvalidParam
        })
    }

    fn set_inflight_fd(&mut self, shape: &VhostUserInflight, file: File) -> Result<()> {
        let memory = InflightMemory::map(shape, file, self.vrings.len()).map_err(refuse)?;
        self.stop_all().map_err(refuse)?;
        match (self.device.cache_mode(), memory.cache_mode()) {
            (CacheMode::Unknown, noted) => drop(self.device.set_cache_mode(noted)),
            // They should agree; where they do not, the guest loses nothing by the safer one.
            (_, CacheMode::Writethrough) => drop(self.device.set_cache_mode(CacheMode::Writethrough)),
            _ => {}
        }
        self.inflight = Some(memory);
        self.vrings.iter_mut().for_each(Vring::recover);
        self.start_all()
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let memory = self.memory.with(region_info(region), file).map_err(refuse)?;
        self.set_memory(memory)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let memory = self.memory.without(region_info(region)).map_err(refuse)?;
        self.set_memory(memory)
    }

    fn set_device_state_fd(
        &mut self,
        direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        file: File,
    ) -> Result<Option<File>> {
        if self.vrings.iter().any(Vring::is_running) {
            return Err(refuse(
                "the state of a disk is transferred while none of its queues runs",
            ));
        }
        match direction {
            VhostTransferStateDirection::SAVE => {
                device_state::save(self.device.cache_mode(), &file).map_err(refuse)?;
            }
            VhostTransferStateDirection::LOAD => self.state = Some(file),
        }
        Ok(None)
    }

    fn check_device_state(&mut self) -> Result<()> {
        // Of a state that was saved there is no more to say.
        let Some(state) = self.state.take() else {
            return Ok(());
        };
        match device_state::load(state).map_err(refuse)? {
            CacheMode::Unknown => {}
            mode => drop(self.device.set_cache_mode(mode)),
        }
        Ok(())
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(MessageError::InvalidOperation(
            "a disk has no shared memory of its own",
        ))
    }

    fn set_log_base(&mut self, shape: &VhostUserLog, file: File) -> Result<()> {
        let log = LogMemory::map(shape, file, self.memory.end()).map_err(|error| {
            if let Some(held_back) = self.device.log_limit().admit() {
                tracing::warn!(%error, held_back, "cannot use a client's log of written pages");
            }
            // The answer has no room for a refusal.
            MessageError::InvalidParam
        })?;
        self.stop_all().map_err(|_| MessageError::InvalidParam)?;
        self.log = Some(log);
        self.start_all()
    }
}
