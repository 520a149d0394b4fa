//! The guest's view of ports and PCI functions. PCI configuration mechanism #1.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::transport::{PciFunction, Window};

/// A device that answers a range of ports.
pub(super) trait Ports: Send + fmt::Debug {
    /// Reads `data` from `offset` of the range.
    fn read(&mut self, offset: u16, data: &mut [u8]);
    /// Writes `data` to `offset` of the range.
    fn write(&mut self, offset: u16, data: &[u8]);
}

type Shared<T> = Arc<Mutex<T>>;

/// A function that is plugged in; shared with the device manager.
pub(super) type Function = Shared<dyn PciFunction>;

/// The slots of the one PCI bus; slot 0 is the host bridge.
pub const SLOTS: usize = 32;
const CONFIG_ADDRESS: u16 = 0xCF8;
const CONFIG_DATA: u16 = 0xCFC;
/// The host bridge: it belongs to no device, and has nothing to set.
const BRIDGE: [u32; 3] = [0x0D57_8086, 0, 0x0600_0000];

/// A device, and the ports at which it answers.
#[derive(Debug)]
struct PortRange {
    first: u16,
    count: u16,
    device: Mutex<Box<dyn Ports>>,
}

/// A function, and where it answers.
type Plugged = (Function, Window);

/// The function in each slot. Only accesses to a function lock it, because it may be busy for long.
#[derive(Debug, Default)]
pub(super) struct Slots(Mutex<[Option<Plugged>; SLOTS]>);

impl Slots {
    /// Plugs a function into a slot.
    pub(super) fn plug(&self, slot: usize, function: Function) {
        let window = function.lock().window();
        if let Some(place) = self.0.lock().get_mut(slot) {
            *place = Some((function, window));
        }
    }

    /// Takes out what is in a slot.
    pub(super) fn unplug(&self, slot: usize) {
        let gone = self.0.lock().get_mut(slot).and_then(Option::take);
        // Not with the slots locked: it may be the last who has it.
        drop(gone);
    }

    /// The lowest slot that is free.
    pub(super) fn free(&self) -> Option<usize> {
        let slots = self.0.lock();
        (1..SLOTS).find(|&slot| matches!(slots.get(slot), Some(None)))
    }

    /// Returns true if something is in a slot.
    pub(super) fn is_taken(&self, slot: usize) -> bool {
        self.function(slot).is_some()
    }

    fn function(&self, slot: usize) -> Option<Function> {
        let slots = self.0.lock();
        let (function, _) = slots.get(slot)?.as_ref()?;
        Some(Arc::clone(function))
    }

    /// The function whose window an address is in, and where in it.
    fn at(&self, address: u64) -> Option<(Function, u64)> {
        self.0.lock().iter().flatten().find_map(|(function, window)| {
            let range = window.range()?;
            let found = range.contains(&address);
            found.then(|| (Arc::clone(function), address - range.start))
        })
    }
}

/// All that answers.
#[derive(Debug)]
pub(super) struct Bus {
    ports: Vec<PortRange>,
    slots: Arc<Slots>,
    address: Mutex<u32>,
}

impl Bus {
    /// A bus with these slots and nothing else.
    pub(super) fn new(slots: Arc<Slots>) -> Self {
        Self {
            ports: Vec::new(),
            slots,
            address: Mutex::default(),
        }
    }

    /// Adds a device at `count` ports from `first` on.
    pub(super) fn add_ports(&mut self, first: u16, count: u16, device: Box<dyn Ports>) {
        let device = Mutex::new(device);
        self.ports.push(PortRange { first, count, device });
    }

    /// A guest reads from a port. Where nothing is there are ones.
    pub(super) fn read_port(&self, port: u16, data: &mut [u8]) {
        data.fill(0xFF);
        match port {
            CONFIG_ADDRESS if data.len() == 4 => data.copy_from_slice(&self.address.lock().to_le_bytes()),
            CONFIG_DATA..=0xCFF => self.read_config(port - CONFIG_DATA, data),
            _ => {
                if let Some((first, device)) = self.port(port) {
                    device.lock().read(port - first, data);
                }
            }
        }
    }

    /// A guest writes to a port.
    pub(super) fn write_port(&self, port: u16, data: &[u8]) {
        match port {
            CONFIG_ADDRESS => {
                if let Some(bytes) = data.first_chunk::<4>() {
                    *self.address.lock() = u32::from_le_bytes(*bytes);
                }
            }
            CONFIG_DATA..=0xCFF => self.write_config(port - CONFIG_DATA, data),
            _ => {
                if let Some((first, device)) = self.port(port) {
                    device.lock().write(port - first, data);
                }
            }
        }
    }

    fn port(&self, port: u16) -> Option<(u16, &Mutex<Box<dyn Ports>>)> {
        let holds = |range: &&PortRange| (range.first..range.first + range.count).contains(&port);
        let range = self.ports.iter().find(holds)?;
        Some((range.first, &range.device))
    }

    /// The slot and the register that the address register selects, if it selects any.
    fn selected(&self) -> Option<(usize, u16)> {
        let address = *self.address.lock();
        let enabled = address & 1 << 31 != 0;
        let (bus, slot, function) = (address >> 16 & 0xFF, address >> 11 & 0x1F, address >> 8 & 7);
        (enabled && bus == 0 && function == 0).then_some((slot as usize, (address & 0xFC) as u16))
    }

    fn read_config(&self, within: u16, data: &mut [u8]) {
        let Some((slot, register)) = self.selected() else {
            return;
        };
        if slot == 0 {
            let word = BRIDGE.get(usize::from(register / 4)).copied().unwrap_or_default();
            for (byte, value) in data.iter_mut().zip(word.to_le_bytes().iter().skip(within.into())) {
                *byte = *value;
            }
        } else if let Some(function) = self.slots.function(slot) {
            function.lock().read_config(register + within, data);
        }
    }

    fn write_config(&self, within: u16, data: &[u8]) {
        if let Some((slot, register)) = self.selected()
            && let Some(function) = self.slots.function(slot)
        {
            function.lock().write_config(register + within, data);
        }
    }

    /// A guest reads where no memory is. Where nothing is there are ones.
    pub(super) fn read_memory(&self, address: u64, data: &mut [u8]) {
        data.fill(0xFF);
        if let Some((function, offset)) = self.slots.at(address) {
            function.lock().read(offset, data);
        }
    }

    /// A guest writes where no memory is.
    pub(super) fn write_memory(&self, address: u64, data: &[u8]) {
        if let Some((function, offset)) = self.slots.at(address) {
            function.lock().write(offset, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    /// A function that answers with its number.
    #[derive(Debug)]
    struct Numbered(u8, Window);

    impl PciFunction for Numbered {
        fn read_config(&mut self, _: u16, data: &mut [u8]) {
            data.fill(self.0);
        }

        fn write_config(&mut self, _: u16, _: &[u8]) {}

        fn window(&self) -> Window {
            self.1.clone()
        }

        fn read(&mut self, _: u64, data: &mut [u8]) {
            data.fill(self.0);
        }

        fn write(&mut self, _: u64, _: &[u8]) {}
    }

    /// A function stays locked while it drains its queues.
    #[test]
    fn busy_function_does_not_block_the_others() {
        let slots = Arc::new(Slots::default());
        let functions: Vec<Function> = (1..=3)
            .map(|number| {
                let window = Window::new(0x1000);
                window.set(Some(u64::from(number) * 0x1000));
                Arc::new(Mutex::new(Numbered(number, window))) as Function
            })
            .collect();
        for (slot, function) in (1..).zip(&functions) {
            slots.plug(slot, Arc::clone(function));
        }
        let bus = Arc::new(Bus::new(Arc::clone(&slots)));
        let busy = functions[0].lock();
        let (sender, answers) = mpsc::channel();
        let cpu = std::thread::spawn(move || {
            for address in [0x2000, 0x3FFF, 0x4000] {
                let mut byte = [0];
                bus.read_memory(address, &mut byte);
                sender.send(byte[0]).expect("somebody listens");
            }
            slots.unplug(2);
            let mut byte = [0];
            bus.read_memory(0x2000, &mut byte);
            sender.send(byte[0]).expect("somebody listens");
        });
        for expected in [2, 3, 0xFF, 0xFF] {
            assert_eq!(answers.recv_timeout(Duration::from_secs(20)), Ok(expected));
        }
        drop(busy);
        cpu.join().expect("no panic");
    }
}
