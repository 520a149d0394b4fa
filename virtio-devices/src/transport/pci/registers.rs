//! The common configuration registers (virtio 1.2, 4.1.4.3): status, features, and the selected queue.
//!
//! Invariants: features do not change after FEATURES_OK, nor a queue's size and addresses while it is enabled. A status of zero
//! has stopped every queue when the write returns.

use std::sync::atomic::Ordering;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

use super::super::device::DeviceError;
use super::super::function::STATUS_NEEDS_RESET;
use super::super::msix::NO_VECTOR;
use super::super::queue::PciQueue;
use super::Function;
use super::layout::COMMON_BYTES;

pub(super) const STATUS_DRIVER_OK: u8 = 4;
const STATUS_FEATURES_OK: u8 = 8;
/// `VIRTIO_F_RING_RESET`: a queue can be reset alone.
const FEATURE_RING_RESET: u64 = 1 << 40;

impl Function {
    fn offered(&self) -> u64 {
        self.device.features() | FEATURE_RING_RESET
    }

    fn set_status(&mut self, status: u8) {
        if status == 0 {
            if let Err(error) = self.stop_all() {
                self.cannot_stop(&error);
            }
            self.queues.iter_mut().for_each(PciQueue::reset);
            self.device.reset();
            self.features = 0;
            (self.device_feature_select, self.driver_feature_select) = (0, 0);
            self.queue_select = 0;
            self.shared.config_vector.store(NO_VECTOR, Ordering::SeqCst);
            self.shared.isr.store(0, Ordering::SeqCst);
            self.shared.status.store(0, Ordering::SeqCst);
            return;
        }
        let mut status = status;
        let before = self.shared.status.load(Ordering::SeqCst);
        if status & !before & STATUS_FEATURES_OK != 0 {
            let good = self.features & !self.offered() == 0 && self.features & 1 << VIRTIO_F_VERSION_1 != 0;
            if !good {
                status &= !STATUS_FEATURES_OK;
            }
        }
        // A worker may set the one bit that says that a reset is needed, at any time.
        let kept = self.shared.status.fetch_or(status, Ordering::SeqCst) & STATUS_NEEDS_RESET;
        self.shared.status.fetch_and(status | kept, Ordering::SeqCst);
        if status & !before & STATUS_DRIVER_OK != 0 {
            self.start_all();
        }
    }

    fn set_features(&mut self, value: u32) {
        if self.shared.status.load(Ordering::SeqCst) & STATUS_FEATURES_OK != 0 {
            return;
        }
        let value = u64::from(value);
        match self.driver_feature_select {
            0 => self.features = self.features & !0xFFFF_FFFF | value,
            1 => self.features = self.features & 0xFFFF_FFFF | value << 32,
            _ => {}
        }
    }

    /// The common registers as a guest would read them.
    pub(super) fn common(&self) -> [u8; COMMON_BYTES as usize] {
        let mut bytes = [0; COMMON_BYTES as usize];
        let mut put =
            |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        put(0, &self.device_feature_select.to_le_bytes());
        put(4, &half(self.offered(), self.device_feature_select).to_le_bytes());
        put(8, &self.driver_feature_select.to_le_bytes());
        put(12, &half(self.features, self.driver_feature_select).to_le_bytes());
        put(
            16,
            &self.shared.config_vector.load(Ordering::SeqCst).to_le_bytes(),
        );
        put(18, &(self.queues.len() as u16).to_le_bytes());
        put(20, &[self.shared.status.load(Ordering::SeqCst)]);
        put(21, &[self.shared.generation.load(Ordering::SeqCst)]);
        put(22, &self.queue_select.to_le_bytes());
        if let Some(queue) = self.queues.get(usize::from(self.queue_select)) {
            put(24, &queue.size.to_le_bytes());
            put(26, &queue.vector().to_le_bytes());
            put(28, &u16::from(queue.enabled).to_le_bytes());
            put(30, &self.queue_select.to_le_bytes());
            put(32, &queue.addresses.descriptors.to_le_bytes());
            put(40, &queue.addresses.available.to_le_bytes());
            put(48, &queue.addresses.used.to_le_bytes());
        }
        bytes
    }

    pub(super) fn write_common(&mut self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 8];
        for (byte, value) in bytes.iter_mut().zip(data) {
            *byte = *value;
        }
        let value = u64::from_le_bytes(bytes);
        let vectors = self.queues.len() as u16 + 1;
        let vector = if (value as u16) < vectors {
            value as u16
        } else {
            NO_VECTOR
        };
        match (offset, data.len()) {
            (0, 4) => self.device_feature_select = value as u32,
            (8, 4) => self.driver_feature_select = value as u32,
            (12, 4) => self.set_features(value as u32),
            (16, 2) => self.shared.config_vector.store(vector, Ordering::SeqCst),
            (20, 1) => self.set_status(value as u8),
            (22, 2) => self.queue_select = value as u16,
            (28, 2) if value == 1 => {
                if let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) {
                    queue.enabled = true;
                }
                self.start_all();
            }
            (58, 2) if value == 1 && self.features & FEATURE_RING_RESET != 0 => self.reset_queue(),
            _ => self.write_queue(offset, data.len(), value, vector),
        }
    }

    fn reset_queue(&mut self) {
        let index = usize::from(self.queue_select);
        if let Some(queue) = self.queues.get_mut(index) {
            let stopped = queue.stop(&mut *self.device);
            queue.reset();
            if let Err(error) = stopped {
                self.cannot_stop(&error);
            }
        }
    }

    fn cannot_stop(&self, error: &DeviceError) {
        if let Some(held_back) = self.shared.log_limit.admit() {
            tracing::error!(disk = %self.shared.name, %error, held_back, "cannot stop a queue");
        }
    }

    /// The registers of the selected queue that only a queue that is not enabled takes.
    fn write_queue(&mut self, offset: u64, len: usize, value: u64, vector: u16) {
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else {
            return;
        };
        if (offset, len) == (26, 2) {
            if let Err(error) = queue.set_vector(vector, &mut *self.device) {
                if let Some(held_back) = self.shared.log_limit.admit() {
                    let disk = &self.shared.name;
                    tracing::error!(%disk, %error, held_back, "cannot change a queue's interrupt");
                }
                self.shared.needs_reset();
            }
            return;
        }
        if queue.enabled {
            return;
        }
        let addresses = &mut queue.addresses;
        match (offset, len) {
            // What was offered is the most that memory is spent on.
            (24, 2) => queue.size = queue.size_max.min(value as u16),
            (32..40, _) => set_part(&mut addresses.descriptors, offset - 32, len, value),
            (40..48, _) => set_part(&mut addresses.available, offset - 40, len, value),
            (48..56, _) => set_part(&mut addresses.used, offset - 48, len, value),
            _ => {}
        }
    }
}

/// Sets half of an address, or all of it.
fn set_part(address: &mut u64, offset: u64, len: usize, value: u64) {
    match (offset, len) {
        (0, 8) => *address = value,
        (0, 4) => *address = *address & !0xFFFF_FFFF | value,
        (4, 4) => *address = *address & 0xFFFF_FFFF | value << 32,
        _ => {}
    }
}
