//! A virtio device as a PCI function: the registers of virtio 1.2, 4.1.4, in one memory window.
//!
//! Invariants: the function's queues run exactly while the driver has set DRIVER_OK, they are enabled and the machine
//! is not paused; and when a reset or a pause returns, none of them touches guest memory any more.

mod layout;
mod registers;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use block::report::LogLimit;

use super::config_space::{COMMAND_MEMORY, ConfigSpace, at};
use super::device::{Device, DeviceError};
use super::error::PlugError;
use super::function::{FunctionState, signal};
use super::msix::{Msix, NO_VECTOR};
use super::queue::PciQueue;
use super::{Machine, PciFunction, Window};
pub use layout::BAR_BYTES;
pub(super) use layout::Kind;
use layout::{COMMON, COMMON_BYTES, DEVICE, ISR, NOTIFY, NOTIFY_STRIDE, PENDING, TABLE};
use registers::STATUS_DRIVER_OK;

/// A function before it is on a bus.
#[derive(Debug)]
pub(super) struct Shape {
    pub(super) kind: Kind,
    /// The name in logs.
    pub(super) name: String,
    pub(super) queues: u16,
    /// The most entries of a queue.
    pub(super) queue_size: u16,
    pub(super) log_limit: Arc<LogLimit>,
}

/// A virtio device on a PCI bus.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) device: Box<dyn Device>,
    machine: Arc<dyn Machine>,
    space: ConfigSpace,
    msix: Msix,
    msix_at: u16,
    access_at: u16,
    pub(super) shared: Arc<FunctionState>,
    queues: Vec<PciQueue>,
    device_feature_select: u32,
    driver_feature_select: u32,
    pub(super) features: u64,
    queue_select: u16,
    /// The function's window, and the addresses of kicks.
    window: Window,
    watched: Option<u64>,
    /// It is in no slot any more.
    unplugged: bool,
    paused: bool,
}

impl Function {
    /// A function for the device that `make` answers.
    pub(super) fn show(
        shape: Shape,
        machine: Arc<dyn Machine>,
        window: u32,
        make: impl FnOnce(Arc<FunctionState>) -> Result<Box<dyn Device>, PlugError>,
    ) -> Result<Self, PlugError> {
        let Shape {
            kind,
            name,
            queues,
            queue_size,
            log_limit,
        } = shape;
        let msix = Msix::new(&*machine, queues + 1, &log_limit)?;
        let layout::Capabilities {
            space,
            msix_at,
            access_at,
        } = layout::capabilities(kind, window, queues);
        let shared = Arc::new(FunctionState {
            name,
            log_limit,
            status: AtomicU8::new(0),
            isr: AtomicU8::new(0),
            generation: AtomicU8::new(0),
            config_vector: AtomicU16::new(NO_VECTOR),
            vectors: Arc::clone(msix.vectors()),
        });
        Ok(Self {
            queues: (0..queues)
                .map(|index| PciQueue::new(index, queue_size, msix.vectors()))
                .collect::<Result<_, _>>()?,
            device: make(Arc::clone(&shared))?,
            machine,
            space,
            msix,
            msix_at,
            access_at,
            shared,
            device_feature_select: 0,
            driver_feature_select: 0,
            features: 0,
            queue_select: 0,
            window: Window::new(BAR_BYTES.into()),
            watched: None,
            unplugged: false,
            paused: false,
        })
    }

    /// Drains all queues and makes durable what was answered. Until [`Function::resume`] nothing is taken
    /// from them any more.
    ///
    /// # Errors
    ///
    /// The device's error; the queues are stopped in any case.
    pub(super) fn pause(&mut self) -> io::Result<()> {
        self.paused = true;
        self.stop_all().map_err(io::Error::other)?;
        self.device.flush()
    }

    /// Lets the queues run again.
    pub(super) fn resume(&mut self) {
        self.paused = false;
        self.start_all();
    }

    /// Unplugs the function: drains its queues for good. What a guest writes from now on, through
    /// an access that found the function before, changes nothing.
    ///
    /// # Errors
    ///
    /// If a worker has ended.
    pub(super) fn unplug(&mut self) -> io::Result<()> {
        self.unplugged = true;
        self.window.set(None);
        self.watch(None);
        self.msix.disconnect();
        self.stop_all().map_err(io::Error::other)
    }

    fn stop_all(&mut self) -> Result<(), DeviceError> {
        let mut result = Ok(());
        for queue in &mut self.queues {
            result = result.and(queue.stop(&mut *self.device));
        }
        result
    }

    fn start_all(&mut self) {
        let status = self.shared.status.load(Ordering::SeqCst);
        if self.unplugged || self.paused || status & STATUS_DRIVER_OK == 0 {
            return;
        }
        for queue in &mut self.queues {
            if let Err(error) = queue.start(&mut *self.device, self.features) {
                if let Some(held_back) = self.shared.log_limit.admit() {
                    tracing::warn!(device = %self.shared.name, %error, held_back, "cannot start a queue");
                }
                self.shared.needs_reset();
            }
        }
    }

    /// Moves the watch for kicks to a window at `base`, or ends it.
    fn watch(&mut self, base: Option<u64>) {
        if self.watched == base {
            return;
        }
        for (queue, at) in self.queues.iter().zip((NOTIFY..).step_by(NOTIFY_STRIDE as usize)) {
            let unwatched = self
                .watched
                .map(|old| self.machine.unwatch(old + at, queue.kick()));
            let watched = base.map(|new| self.machine.watch(new + at, queue.kick()));
            for result in [unwatched, watched].into_iter().flatten() {
                // The guest's write comes here instead.
                if let Err(error) = result
                    && let Some(held_back) = self.shared.log_limit.admit()
                {
                    tracing::warn!(device = %self.shared.name, %error, held_back, "cannot watch for kicks");
                }
            }
        }
        self.watched = base;
    }

    fn write_device(&mut self, offset: u64, data: &[u8]) {
        if let Err(error) = self.device.write_config(offset, data, self.features) {
            if let Some(held_back) = self.shared.log_limit.admit() {
                tracing::error!(device = %self.shared.name, %error, held_back, "cannot change the configuration");
            }
            self.shared.needs_reset();
        }
    }

    /// Returns the access that the access capability requests: an offset in the window, and a number of bytes.
    fn access(&self) -> Option<(u64, usize)> {
        let (offset, len) = (
            self.space.u32_at(self.access_at + 8),
            self.space.u32_at(self.access_at + 12),
        );
        let first = self.space.u32_at(self.access_at + 4) & 0xFF == 0;
        (first && [1, 2, 4].contains(&len)).then_some((offset.into(), len as usize))
    }
}

/// Makes a type that is a [`Function`] in a wrapper one on a bus.
macro_rules! is_function {
    ($name:ident) => {
        impl PciFunction for $name {
            fn read_config(&mut self, offset: u16, data: &mut [u8]) {
                self.0.read_config(offset, data);
            }

            fn write_config(&mut self, offset: u16, data: &[u8]) {
                self.0.write_config(offset, data);
            }

            fn window(&self) -> Window {
                self.0.window()
            }

            fn read(&mut self, offset: u64, data: &mut [u8]) {
                self.0.read(offset, data);
            }

            fn write(&mut self, offset: u64, data: &[u8]) {
                self.0.write(offset, data);
            }
        }
    };
}
pub(super) use is_function;

impl PciFunction for Function {
    fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        if offset == self.access_at + 16
            && let Some((place, len)) = self.access()
        {
            let mut bytes = [0; 4];
            self.read(place, &mut bytes[..len]);
            self.space.put(offset, &bytes);
        }
        self.space.read(offset, data);
    }

    fn write_config(&mut self, offset: u16, data: &[u8]) {
        if self.unplugged {
            return;
        }
        self.space.write(offset, data);
        if offset & !3 == self.msix_at {
            self.msix.set_control(self.space.u16_at(self.msix_at + 2));
        }
        if offset == self.access_at + 16
            && let Some((place, len)) = self.access()
            && let Some(data) = data.get(..len)
        {
            self.write(place, data);
        }
        let base = u64::from(self.space.u32_at(at::BAR0) & !(BAR_BYTES - 1));
        let answers = self.space.u16_at(at::COMMAND) & COMMAND_MEMORY != 0;
        let base = answers.then_some(base);
        self.window.set(base);
        self.watch(base);
    }

    fn window(&self) -> Window {
        self.window.clone()
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match offset {
            COMMON..COMMON_BYTES => {
                let bytes = self.common();
                for (byte, value) in data.iter_mut().zip(bytes.iter().skip(offset as usize)) {
                    *byte = *value;
                }
            }
            ISR => {
                if let Some(byte) = data.first_mut() {
                    *byte = self.shared.isr.swap(0, Ordering::SeqCst);
                }
            }
            DEVICE..NOTIFY => self.device.read_config(offset - DEVICE, data, self.features),
            TABLE..PENDING => self.msix.read_table(offset - TABLE, data),
            PENDING.. => self.msix.read_pending(offset - PENDING, data),
            _ => {}
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match offset {
            _ if self.unplugged => {}
            COMMON..COMMON_BYTES => self.write_common(offset, data),
            DEVICE..NOTIFY => self.write_device(offset - DEVICE, data),
            NOTIFY..TABLE => {
                let index = (offset - NOTIFY) / NOTIFY_STRIDE;
                if let Some(queue) = self.queues.get(index as usize) {
                    signal(queue.kick());
                }
            }
            TABLE..PENDING if offset.is_multiple_of(4) => self.msix.write_table(offset - TABLE, data),
            _ => {}
        }
    }
}
